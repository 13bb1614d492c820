"""What a command loads before it can begin: libraries that it has no use for cost its user seconds."""

import subprocess
import sys
import textwrap


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded once it ran `code`."""
    script = f"{textwrap.dedent(code)}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_the_supervisor_and_its_report_need_neither_torch_nor_hivemind() -> None:
    loaded = loaded_after("import swarmkit.compose, swarmkit.launch, swarmkit.report")
    assert "swarmkit.report" in loaded
    assert not {"torch", "hivemind", "scipy", "matplotlib", "transformers"} & loaded


def test_a_peer_loads_no_library_that_it_does_not_use() -> None:
    loaded = loaded_after(
        """
        import sys
        import swarmkit.local_peer, swarmkit.baseline
        from hivemind.averaging import load_balancing
        assert "scipy.optimize" not in sys.modules
        # What hivemind does not load with itself is there all the same for who wants it.
        assert load_balancing.scipy.optimize.linprog([1.0], bounds=[(2.0, None)]).x[0] == 2.0
        """
    )
    assert {"torch", "hivemind", "scipy.optimize"} <= loaded
    assert not {"hydra", "matplotlib", "transformers", "datasets", "tensorboard"} & loaded
