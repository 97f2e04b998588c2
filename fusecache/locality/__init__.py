"""The node's side of co-scheduling: what this node holds, told to the controller.

    measure, block_table   from names of block files to bytes of data sets (pure)
    totals                 how large a data set is, as far as it was listed (pure)
    holdings               the node, from what its mounts answer (pure)
    report_state           which report comes next, what a directive means (pure)
    reporter               the stream; the only importer of grpc here

Block files and listings are read by `daemon.dataset_bytes` in each mount; `daemon.node_reports` joins it all in
`serve`.
"""
