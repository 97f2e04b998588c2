"""A take-over: a mount goes from one supervisor (the old side) to another one (the new side) while everybody reads on.

A later `fusecache mount` or `serve` finds the mount and asks for it at its socket (`daemon.takeover`): an upgrade. Or
the old side itself starts a process that does so, because of SIGHUP: a reload. From there on both are the same:

1. The old side ends what there can't be twice, agent and embedded server. Its gate and workers go on serving.
2. It gives away copies of what the mount consists of: the connection, the gate's device, the table of open inodes.
3. The new side becomes a supervisor, starts agent, gate (which does not read yet) and workers, and says so.
4. The old gate stops reading, and gives up the requests that it has not answered.
5. The new side takes the token, its gate goes on with those requests, and the old side ends without unmounting. When
   the old side started the new one, it stays as its parent, because others know its process id.

Until 5 each side may fail, hang or be late: the other one then has the mount, and exactly one of them. How that is
certain is the subject of `states`, which is the file to begin with.

    states          both sides as tables: what leads where, who has the mount then, how long each state may last
    messages        what the two say to each other, and which protocols they speak
    line            how a message gets across, with descriptors
    private_socket  where the old side is found, and who may come
    facts           what is given: what is true of the connection, its descriptors, and the checks of both
    token           taken by one of the two, once
    carried         the requests that the old gate had not answered, from gate to gate
    old_side        carries out the old side's table, for the supervisor that has the mount
    new_side        carries out the new side's table, for the supervisor that takes it
    reloading       SIGHUP: starts the process that takes the mount over, and hears what became of it
    first_process   what the old side becomes after a reload: the parent that stands for whoever has the mount
"""
