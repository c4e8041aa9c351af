"""Every private torch name that gradweave uses, and nothing else."""
