"""The STRIDE index on disk: a Zarr v3 group of memory-mappable arrays. See SPEC.md."""
