"""The disk transport: versions as folders, whole or as differences, for servers that share a file system."""
