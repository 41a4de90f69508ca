"""What a spawned process runs before anything else: it ends with the process that spawned it, imports without looking
for garbage, and its threads yield.

What it starts ends with it, too, from `signals.handle_signals` on; before that it starts nothing.
"""

import gc

from labkit.system import host

host.die_with_parent()

# Importing torch makes some 300,000 objects, none of them garbage; to look through them again and again is a tenth of
# the time that it takes. The code that goes on from here turns it on again: a rank in `main.do_jobs`.
gc.disable()

host.set_start_environment()
