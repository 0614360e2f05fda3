import multiprocessing
import sys

from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
from sglang.srt.entrypoints import engine
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

def main():
    add_deterministic_attention_backend_choices(["torch_native"])
    import sglang.srt.batch_invariant_ops as b
    b.enable_batch_invariant_mode = lambda: None
    orig = engine._set_envs_and_config
    def patched(server_args):
        orig(server_args)
        multiprocessing.set_start_method("fork", force=True)
    engine._set_envs_and_config = patched
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))

if __name__ == "__main__":
    main()
