"""The process of a mount that must not die: mounts, starts and restarts every part, takes all down again. Standard
library only.

    main            the loop, and the way up and down; `phases` says what an end means in each
    agents, gates, workers, embedded_server
                    the life of each kind of part; `roles` says what each is given, `parts` what one process is
    restart_policy, part_watch
                    when a part that died is started again, and which one does not turn any more
    session         the mount itself; `unmounting` and `ending` are its way down
    takeover        how a mount goes to another supervisor
"""
