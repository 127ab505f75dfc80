"""The APIs. Each door validates the input of one API, calls the service, and formats results and errors; it has no
rules about timers."""
