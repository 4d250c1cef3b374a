"""What `csc serve` answers: KServe's V1 protocol, and images as they are.

GET  /healthz                  200 as soon as the model is loaded
GET  /v1/models                {"models": [NAME]}
GET  /v1/models/NAME           {"name": NAME, "ready": true}
POST /v1/models/NAME:predict   {"instances": [{"image": {"b64": "…"}}, …]} → {"predictions": [{"classes": […]}, …]}
POST /predict                  the bytes of one image → {"classes": [{"name": "dog", "confidence": 0.93}, …]}

`?threshold=0.5` replaces the threshold of the model. A refused request is answered with {"error": "why"}. Images
come as bytes only: no request names a file.
"""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from csc.data import FORMATS
from csc.errors import BadData
from csc.serving.predictor import Predictor, TooLarge, above, from_base64, open_image

__all__ = ["application"]

# What one request may ask for. Sixteen of the largest, one of them decoded, fit into 2 GB with the model.
BODY_BYTES = 32 << 20
INSTANCES = 64
PIXELS = 100_000_000  # of all images of a request; a small file may unfold to many
WAITING = 16  # requests; more are sent away
UPLOAD_SECONDS = 30
MEDIA_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)

Classes = list[dict[str, str | float]]


class Service:
    """One model and the requests for it, answered one at a time: torch computes each on all cores."""

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name, self.predictor = name, predictor
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="predict")
        self.waiting = 0

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"models": [self.name]})

    async def model(self, request: Request) -> Response:
        self._check_name(request)
        return JSONResponse({"name": self.name, "ready": True})

    async def predict_instances(self, request: Request) -> Response:
        self._check_name(request)
        found = await self._answer(request, _instances)
        return JSONResponse({"predictions": [{"classes": classes} for classes in found]})

    async def predict_image(self, request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in MEDIA_TYPES:
            raise HTTPException(415, f"Content-Type {media_type or 'missing'}: expected {', '.join(MEDIA_TYPES)}")
        (classes,) = await self._answer(request, lambda body: [body])
        return JSONResponse({"classes": classes})

    def _check_name(self, request: Request) -> None:
        if (name := request.path_params["name"]) != self.name:
            raise HTTPException(404, f"no model '{name}' here; this is '{self.name}'")

    async def _answer(self, request: Request, read: Callable[[bytes], list[bytes]]) -> list[Classes]:
        """The classes of each image of a request, whose body `read` takes apart."""
        thresholds = self._thresholds(request)
        if self.waiting >= WAITING:
            raise HTTPException(503, "too many requests at once; try again", {"Retry-After": "1"})
        self.waiting += 1
        try:
            body = await _body(request)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.worker, lambda: self._predict(read(body), thresholds))
        finally:
            self.waiting -= 1

    def _thresholds(self, request: Request) -> Mapping[str, float]:
        text = request.query_params.get("threshold")
        if text is None:
            return self.predictor.thresholds
        try:
            threshold = float(text)
        except ValueError:
            threshold = -1.0
        if not 0 <= threshold <= 1:
            raise HTTPException(400, f"threshold {text}: expected a number from 0 to 1")
        return dict.fromkeys(self.predictor.card.classes, threshold)

    def _predict(self, images: Sequence[bytes], thresholds: Mapping[str, float]) -> list[Classes]:
        _check_pixels(images)
        try:
            scores = self.predictor.confidences(images)
        except BadData as error:
            raise HTTPException(422, str(error)) from None
        found = [above(row, thresholds) for row in scores.tolist()]
        return [[{"name": name, "confidence": round(value, 6)} for name, value in classes] for classes in found]


async def _body(request: Request) -> bytes:
    """The body of a request, if it is neither too large nor too slow."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                # What is too much is read and dropped: many clients listen only when they have sent everything.
                if size <= BODY_BYTES:
                    body += chunk
    except TimeoutError:
        raise HTTPException(408, f"not all of it came within {UPLOAD_SECONDS} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection ended too early") from None
    if size > BODY_BYTES:
        raise HTTPException(413, f"more than {BODY_BYTES >> 20} MiB; send fewer or smaller images")
    return bytes(body)


def _instances(body: bytes) -> list[bytes]:
    """The encoded images of a request in KServe's V1 protocol."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # JSON, or its encoding
        raise HTTPException(400, "not JSON") from None
    instances = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(instances, list) or not instances:
        raise HTTPException(400, 'expected {"instances": [{"image": {"b64": "…"}}, …]} with one image or more')
    if len(instances) > INSTANCES:
        raise HTTPException(413, f"{len(instances)} instances: at most {INSTANCES} at once")
    return [_instance(instance, number) for number, instance in enumerate(instances, start=1)]


def _instance(instance: Any, number: int) -> bytes:
    image = instance.get("image", instance) if isinstance(instance, dict) else None
    text = image.get("b64") if isinstance(image, dict) else None
    if not isinstance(text, str):
        raise HTTPException(400, f'image {number}: expected {{"image": {{"b64": "…"}}}}')
    try:
        return from_base64(text)
    except BadData as error:
        raise HTTPException(400, f"image {number}: {error}") from None


def _check_pixels(images: Sequence[bytes]) -> None:
    """Refuse what is no image, and what would take too long to decode, by the heads of the images."""
    pixels = 0
    for number, image in enumerate(images, start=1):
        try:
            width, height = open_image(image).size
        except BadData as error:
            raise HTTPException(413 if isinstance(error, TooLarge) else 422, f"image {number}: {error}") from None
        pixels += width * height
        if pixels > PIXELS:
            raise HTTPException(413, f"image {number}: {width:,} × {height:,}; at most {PIXELS:,} pixels in a request")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _failed(_: Request, __: Exception) -> Response:
    """An error of ours; the log has it, the answer does not."""
    return JSONResponse({"error": "internal error; the log of the server has more"}, 500)


def application(name: str, predictor: Predictor) -> Starlette:
    """An ASGI application that answers for one model."""
    service = Service(name, predictor)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is too large is refused

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.worker.shutdown()

    routes = [
        Route("/healthz", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name}:predict", service.predict_instances, methods=["POST"]),
        Route("/v1/models/{name}", service.model),
        Route("/predict", service.predict_image, methods=["POST"]),
    ]
    handlers = {HTTPException: _refused, Exception: _failed}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
