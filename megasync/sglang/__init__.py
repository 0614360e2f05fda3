"""What runs inside SGLang's own processes, and why. SGLang loads it through its plugin entry point (`plugin.register`).

    updates         weight syncs: commands that each rank answers, and commits that all ranks make or none
    adapters        a request uses the adapter of its server's version (`sync.disk.adapters`)
    guard           a server that megasync started with keys answers on a few routes only
    handover        a prompt's cache goes from a prefill to a decode engine, encrypted
    prompts         a decode engine asks for prompts, so that a dropped request drops its call
    pipeline        commands and commits reach every pipeline stage of a server
    group_sockets   the processes of a server with attention groups talk over files, not TCP ports
    models          model classes that keep weights as Hugging Face stores them
    plugin          reads the process's environment and registers these; small hooks stand there
    hooks           SGLang's plugin registry

Nothing of megasync imports this package, besides tests; the two sides meet in `serving.plugin_protocol`. SGLang and
torch are imported when a hook first runs. `lab.engine_blueprint`, which runs in a process of its own, is the only
other module that imports SGLang.

Two more modules run in these processes and know a model only as named tensors: `layout.load_trace` finds out where a
rank keeps each weight, and `sync.shard.receiver` takes in what `sync.shard.sender` sends. The receiver stays beside the
sender, because the two change together; `updates` tells it what only SGLang knows.
"""
