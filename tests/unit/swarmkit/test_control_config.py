"""Settings of the control plane: beyond loopback only with mutual TLS, and files that cannot work are named."""

from pathlib import Path
from typing import Any

import pytest

from swarmkit.config import Config, config_from_json, config_to_publish
from swarmkit.control_config import ControlConfig
from swarmkit.errors import ConfigError
from swarmkit.launch import _of_slot
from swarmkit.preemption import PreemptionConfig
from tests.unit.peers.harness_certificates import Authority, write


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.2:7000", "[::1]:0", "localhost:7000"])
def test_loopback_needs_no_certificate(listen: str) -> None:
    assert ControlConfig(listen=listen).settings().tls is None


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:7000", "192.0.2.1:7000", "gpu7.example.org:7000"])
def test_beyond_loopback_it_is_refused_without_mutual_tls(listen: str) -> None:
    with pytest.raises(ValueError, match=r"could drain this peer; listen on 127\.0\.0\.1, or set control\.cert"):
        ControlConfig(listen=listen)
    with pytest.raises(ValueError, match="only those with a certificate may call"):
        ControlConfig(listen=listen, cert="cert.pem", key="key.pem")
    ControlConfig(listen=listen, cert="cert.pem", key="key.pem", client_ca="ca.pem")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"listen": "x"}, "must be host:port"),
        ({"cert": "a"}, "set both or none"),
        ({"key": "a"}, "set both or none"),
        ({"client_ca": "a"}, "works with TLS only"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ControlConfig(**settings)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    cert, key = ours.vouch("peer")
    _, other = theirs.vouch("peer")
    paths = write(tmp_path, cert=cert, key=key, ca=ours.certificate, other=other, junk=b"junk")

    def load(**changes: Any) -> Any:
        chosen = {"cert": paths["cert"], "key": paths["key"], "client_ca": paths["ca"], **changes}
        return ControlConfig(listen="0.0.0.0:0", **chosen).settings()

    assert load().tls.ca == ours.certificate
    for changes, reason in (
        ({"cert": "/no/such"}, "control.cert=/no/such: cannot be read"),
        ({"cert": paths["junk"]}, "control.cert=.*: holds no PEM certificate"),
        ({"key": paths["junk"]}, "control.key=.*: holds no PEM key"),
        ({"key": paths["other"]}, "is not the key of the certificate"),
        ({"client_ca": paths["junk"]}, "control.client_ca=.*: holds no PEM certificate"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load(**changes)


def test_joiners_learn_nothing_of_this_machines_services() -> None:
    control = ControlConfig(listen="192.0.2.1:7000", cert="/secret/c", key="/secret/k", client_ca="/secret/ca")
    config = Config(control=control, preemption=PreemptionConfig(command="/secret/hook"))
    published = config_to_publish(config)
    assert "secret" not in published
    assert "192.0.2.1" not in published
    assert config_from_json(published).control == ControlConfig()


def test_peers_of_one_machine_have_ports_of_their_own() -> None:
    config = Config(control=ControlConfig(listen="127.0.0.1:7000"))
    assert [_of_slot(config, slot).control.listen for slot in (0, 2)] == ["127.0.0.1:7000", "127.0.0.1:7002"]
    assert _of_slot(Config(), 2).control.listen == "127.0.0.1:0"
