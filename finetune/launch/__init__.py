"""The ranks of a job: started, introduced to each other, watched, and ended with one message and one exit code."""
