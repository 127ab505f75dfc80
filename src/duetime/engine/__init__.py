"""The engine: keeps the promise. One instance of it runs the timers of the shards that it owns.

    Ownership    which shards are ours, and until when that may be believed
    Alarm        when to look next
    Engine       looks: begins what is due in the store, hands it to the dispatcher
    Dispatcher   makes the attempts, within the limits of each destination
    Recorder     writes what came of them, in batches

Memory says when, the store says what: nothing here holds a timer that has not been begun, so a restart loses nothing
and a cancel is judged by the same row as the firing. Each loop is a step that tests call by hand and a dumb runner.
"""
