"""Several processes that train one model: who adds up, who charges, who draws noise. docs/distributed.md."""
