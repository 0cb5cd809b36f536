"""The served names, in OpenAI's shape, or in Anthropic's for clients that send its `anthropic-version`."""

from __future__ import annotations

import datetime
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from pilotfish.server.errors import BadRequest, NotFound
from pilotfish.server.handlers import SERVICE, Service, json_answer
from pilotfish.server.protocol import Model, ModelList

ANTHROPIC_VERSION = "anthropic-version"
MAX_LISTED = 1000


class ModelInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """One model as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if ANTHROPIC_VERSION in request.headers:
        return json_answer(_page(request, service))
    return json_answer(ModelList([_model(service, name) for name in service.served_names]))


async def model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    name = service.check_model(request.match_info["name"])
    return json_answer(_info(service, name) if ANTHROPIC_VERSION in request.headers else _model(service, name))


def _model(service: Service, name: str) -> Model:
    ready = service.client.ready
    return Model(
        id=name,
        created=service.started,
        root=Path(service.files.folder).name,
        max_model_len=ready.max_model_len if ready else None,
    )


def _info(service: Service, name: str) -> ModelInfo:
    length = service.client.ready.max_model_len if service.client.ready else None
    created = datetime.datetime.fromtimestamp(service.started, datetime.UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=length,
        max_tokens=length,
    )


def _page(request: web.Request, service: Service) -> ModelPage:
    """`limit` names after or before one. Raises BadRequest, and NotFound for a name to go on from that is none."""
    names, query = list(service.served_names), request.query
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
        raise BadRequest(f"Want a limit of 1 to {MAX_LISTED}, got {limit[:20]!r}.", param="limit")
    if "after_id" in query:
        names = names[_place(names, query["after_id"]) + 1 :]
    if "before_id" in query:
        names = names[: _place(names, query["before_id"])]
        shown = names[-int(limit) :]
    else:
        shown = names[: int(limit)]
    return ModelPage(
        data=[_info(service, name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


def _place(names: list[str], name: str) -> int:
    if name not in names:
        raise NotFound(f"The model {name[:100]!r} does not exist.", code="model_not_found")
    return names.index(name)
