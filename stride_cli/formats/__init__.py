"""Records as tables for other programs: CSV, Parquet, SQLite, pandas, notebooks."""
