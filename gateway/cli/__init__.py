"""The command line `tandem`: runs both services, and is a client of the public API."""
