"""A rank as code that was written for a script finds its process.

bars                 progress bars made for notebooks, as text
children             the processes that it starts, a DataLoader's workers, say
reuse_process_group  `init_process_group` and `env://`, in a process that labkit has made a member of a group
"""
