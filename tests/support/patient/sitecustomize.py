"""In front of a job's PYTHONPATH: updates of its ranks wait for other nodes as long as it takes.

They wait for a second only, so that on a busy machine a node that is lost may take along what its
ranks alone had. For scripts that cannot be asked to be patient, as they are not ours to change.
"""

import os

if "RANK" in os.environ:
    from worker_hooks.guard import update_clearance

    update_clearance.PATIENCE_S = 120.0
