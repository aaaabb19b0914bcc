"""Answers as tables (CSV, pandas, HTML), and saved answers read back."""
