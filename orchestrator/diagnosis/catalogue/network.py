"""What the program needs from the network."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import raised
from orchestrator.diagnosis.model import Cause

_ANY = r"[A-Za-z_]\w*(?:Error|Exception|Timeout)"

CAUSES = (
    Cause(
        "network-unreachable",
        "a server could not be reached",
        "network",
        (
            raised(
                _ANY,
                "Name or service not known",
                "Temporary failure in name resolution",
                "Failed to resolve",
                "nodename nor servname",
                "getaddrinfo failed",
                "Network is unreachable",
                "No route to host",
                "Max retries exceeded with url",
            ),
            raised(
                "ConnectionRefusedError|ConnectTimeout|ConnectionError|ConnectError|ConnectTimeoutError|URLError|OSError",
                "Connection refused",
                "timed out",
                "Connection timed out",
                without=r"(?:MASTER_ADDR|TCPStore|c10d|init_process_group|_rendezvous)",
            ),
            raised(
                "LocalEntryNotFoundError|OfflineModeIsEnabled|EndpointConnectionError|CommError",
                literals=("LocalEntryNotFoundError", "OfflineModeIsEnabled", "EndpointConnectionError", "CommError"),
            ),
            raised("OSError", "We couldn't connect to", "couldn't connect to"),
        ),
        (
            "The place has no way there: a proxy, a name server, or the server itself. Bring models and data to the "
            "place beforehand and set HF_HUB_OFFLINE=1; or set HTTPS_PROXY in the recipe's env.",
        ),
        "orch exec {place} -- getent hosts huggingface.co",
        retry=True,
        precedence=57,
    ),
    Cause(
        "authentication",
        "a service refused the credentials",
        "network",
        (
            raised("GatedRepoError|RepositoryNotFoundError", literals=("GatedRepoError", "RepositoryNotFoundError")),
            raised(
                _ANY,
                "401 Client Error",
                "403 Client Error",
                "401 Unauthorized",
                "403 Forbidden",
                "Invalid user token",
                "Invalid credentials",
            ),
            raised(
                "UsageError|CommError|AuthenticationError|Error",
                "api_key not configured",
                "No API key configured",
                "permission denied",
                "API key must be 40 characters long",
                "invalid API key",
                literals=(
                    "api_key not configured",
                    "No API key configured",
                    "API key must be 40 characters",
                    "invalid API key",
                    "wandb.errors",
                ),
            ),
            raised(
                "ClientError|NoCredentialsError|PartialCredentialsError",
                "InvalidAccessKeyId",
                "SignatureDoesNotMatch",
                "AccessDenied",
                "ExpiredToken",
                "Unable to locate credentials",
                "(403)",
            ),
        ),
        (
            "A token is missing, wrong or expired, or this account may not read that model or bucket. Name it under "
            "secrets: in the recipe, and have it in this machine's environment at launch.",
        ),
        precedence=64,
    ),
)
