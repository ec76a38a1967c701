"""Brings the files of LoRA adapters to a worker: from folders, hubs, S3, web servers and the deployment's own object store."""
