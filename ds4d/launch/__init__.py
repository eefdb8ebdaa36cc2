"""A job and its processes: starting ranks, who each one is, where output goes, how it ends."""
