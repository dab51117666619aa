"""Which keys are tried at a host, in OpenSSH's order: the agent's and the files', none that may not be used."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.auth_strategy import AuthSource, AuthStrategy, InMemoryPrivateKey

from orchestrator.place.ssh_config import Route

# Seconds for the agent, which may ask its user to confirm.
AGENT_BOUND = 30.0


class Keys(AuthStrategy):
    """The keys of one route. `notes` says of files that could not be used why not."""

    def __init__(self, route: Route) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self.route = route
        self.notes: list[str] = []
        self.tried = 0
        self._agent: Any = None

    def get_sources(self) -> Iterator[AuthSource]:
        """Agent keys that a configured file names, the other agent keys, then key files."""
        agent_keys = self._agent_keys()
        by_blob = {key.asbytes(): key for key in agent_keys}
        files = [path for path in self.route.identity_files if path.is_file()]
        named = [blob for blob in map(public_blob, files) if blob in by_blob]
        order = list(dict.fromkeys(named))
        if not self.route.identities_only:
            order += [blob for blob in by_blob if blob not in order]
        for blob in order:
            self.tried += 1
            yield InMemoryPrivateKey(self.route.user, by_blob[blob])
        for path in files:
            if public_blob(path) in order:
                continue  # the agent has been asked for this one
            key = self._load(path)
            if key is not None:
                self.tried += 1
                yield InMemoryPrivateKey(self.route.user, key)

    def authenticate(self, transport: paramiko.Transport) -> Any:
        """Tries them in turn. Raises paramiko's AuthFailure."""
        try:
            return super().authenticate(transport)
        finally:
            if self._agent is not None:
                self._agent._close()

    def _agent_keys(self) -> tuple[AgentKey, ...]:
        if self.route.agent is None:
            return ()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(AGENT_BOUND)
        # paramiko's own Agent looks at SSH_AUTH_SOCK only, and waits without a bound.
        agent: Any = AgentSSH()
        try:
            connection.connect(self.route.agent)
            agent._connect(connection)
        except (OSError, paramiko.SSHException) as error:
            self.notes.append(f"the agent at {self.route.agent} does not answer ({error})")
            connection.close()
            return ()
        self._agent = agent
        keys: tuple[AgentKey, ...] = agent.get_keys()
        return keys

    def _load(self, path: Path) -> paramiko.PKey | None:
        if path.name.endswith(".pub") and not path.name.endswith("-cert.pub"):
            return None  # names a key that only the agent has
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):
            self.notes.append(f"{path} needs a passphrase (ssh-add {path} gives it to the agent)")
        except ValueError as error:
            # cryptography says it this way of its own formats
            needs = "passphrase" in str(error).lower() or "password" in str(error).lower()
            why = f"needs a passphrase (ssh-add {path} gives it to the agent)" if needs else f"cannot be read: {error}"
            self.notes.append(f"{path} {why}")
        except Exception as error:  # many libraries read keys, each with errors of its own
            self.notes.append(f"{path} cannot be read: {error or type(error).__name__}")
        return None


def public_blob(path: Path) -> bytes | None:
    """The public half of an identity file, out of its .pub; None where there is none to read."""
    public = path if path.name.endswith(".pub") else path.with_name(path.name + ".pub")
    try:
        return base64.b64decode(public.read_text("utf-8", "replace").split()[1])
    except (OSError, ValueError, IndexError):
        return None
