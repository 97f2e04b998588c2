"""A gRPC server that speaks Alluxio's wire protocol over a local folder.

One process is a whole small cluster: a master (names, ids, listings) and any number of block workers (bytes),
each with its own port and tier folder. A laptop, the demo and the tests need no JVM. What it does not do:
writing files, mounting other stores, high availability, Kerberos.

A request's way: `server` binds the ports -> `authentication` checks the channel id -> `master` or
`block_worker` answers -> `namespace` (what the master remembers, LMDB) or `block_store` (block files) ->
`source` (the folder itself, the only module that looks at it).
"""
