"""Reader of Minari datasets in HDF5, Arrow and Parquet files; writer of Minari's HDF5 files."""
