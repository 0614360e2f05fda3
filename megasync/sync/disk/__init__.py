"""The disk transport: versions as Hugging Face folders, for servers that share a file system with the trainer."""
