"""One job on several machines: a Ray node on each, the run on the first, all of it put away at the end.

`launcher` runs where the job was asked for, `node` on every machine, held by a leash: the pipe that is its standard
input. When the leash ends, for whatever reason, the machine ends what it started for this job, and nothing else.
"""
