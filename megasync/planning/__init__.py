"""The commands before a run: `plan` resolves a configuration, `doctor` examines the machines. No run imports them."""
