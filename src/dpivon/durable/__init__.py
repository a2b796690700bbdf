"""What must outlive the process: whole files or none, the ledger of releases, checkpoints. Knows nothing of training."""
