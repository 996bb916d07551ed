"""Which checkpoint work of a host runs when. Knows jobs, their urgency and what the host can bear; not what a job does."""
