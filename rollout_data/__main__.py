"""Run the command `rollout-data` as `python -m rollout_data`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("rollout_data.tools", run_name="__main__", alter_sys=True)
