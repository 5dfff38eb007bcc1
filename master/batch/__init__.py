"""`tpi batch`: answers to a file of requests, written to another file. An interrupted run can be continued."""
