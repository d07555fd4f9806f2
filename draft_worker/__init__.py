"""The draft loop: draft for the requests that several decode workers run."""
