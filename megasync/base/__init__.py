"""What every room builds on: durable files, locks, imports by name, the list of secrets, stores of process groups."""
