"""The draft loop: drafts for the requests of several decode workers."""
