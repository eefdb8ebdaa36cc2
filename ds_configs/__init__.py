"""Config files to start from: runnable ones and cluster-size ones. Each passes ``ds4d check``."""
