"""One training job on several hosts: a Ray node on each, the driver on the first, everything shut down at the end.

`launcher` runs where the user started the job, `node` on every host. A control pipe, the standard input of `node`,
connects the two. When the pipe closes, for whatever reason, the host ends every process that it started for this job.
"""
