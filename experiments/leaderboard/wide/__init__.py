"""WRN-16-4 from a prior of random processes, under privacy."""
