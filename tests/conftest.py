"""Options of the test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=12, help="ranks that test_peer_kill.py kills")
    parser.addoption("--injections", type=int, default=30, help="faults that faults/test_campaign.py injects")
    parser.addoption("--fault-seed", type=int, default=1, help="which faults those are")
