"""The engine fires timers. Each instance runs one engine, for the timers of the shards that it owns.

    Ownership    renews the leases: which shards this instance owns, and until when it can rely on that
    Alarm        the time of the next poll (a "look" in this code)
    Engine       polls: begins due timers in the store and passes them to the dispatcher
    Dispatcher   makes the attempts, within the limits of each destination
    Recorder     writes the results to the store, in batches

Memory keeps only the time of the next poll; the store keeps the timers. The engine holds no timer that it has not
begun, so a restart loses nothing, and a cancel and a firing compete for the same row. Each loop is a step that tests
call directly, plus a plain runner.
"""
