"""Training on several devices: replicas, pipelines, and nodes of replicas."""
