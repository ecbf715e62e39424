"""Which faults of the cluster concern a job, and when: levels, filters, hiding, relations.

Device plugins report every event of every device. Some must wait (they often heal), some only
accompany others, some are the job's own business for a while and must not make the scheduler
delete its pods, and some mean something only together. All of this is decided here, without I/O;
`clusterd/faults` reads the reports and passes the results on.
"""
