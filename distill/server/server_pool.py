"""Several servers of one target as one: each request goes to the one with most room, and one that fails is left out by name."""

from __future__ import annotations

import logging
import math
from threading import Condition
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.data import AnswerServerConfig
from distill.server.connection import Connection, GaveUp
from distill.server.logprobs import TargetServer
from distill.server.responses import Model

logger = logging.getLogger("draftsmith")


class SharedConnection(Connection):
    """Connections to several servers, each with at most its `concurrency` of requests; for several threads at once."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections
        in_all = sum(each.config.concurrency for each in connections)
        self.config, self.named_in = connections[0].config.model_copy(update={"concurrency": in_all}), connections[0].named_in
        self._under_way = dict.fromkeys(connections, 0)  # of those that are not left out
        self._changed, self._gone = Condition(), ""

    def stop(self) -> None:
        for each in self.connections:
            each.stop()

    def close(self) -> None:
        for each in self.connections:
            each.close()

    def version(self) -> str | None:
        return self.connections[0].version()

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of a server with room; where one fails at every attempt, of another one.

        Raises:
            InputError: no server is left, or see `Connection.send`.
        """
        while True:
            connection = self._take()
            try:
                return connection.send(method, path, body)
            except GaveUp as error:
                self._leave_out(connection, error)
            finally:
                self._give_back(connection)

    def _take(self) -> Connection:
        with self._changed:
            while True:
                free = {each: each.config.concurrency - number for each, number in self._under_way.items()}
                chosen = max(free, key=lambda each: free[each], default=None)
                if chosen is None:
                    raise InputError(self._gone)
                if free[chosen] > 0:
                    self._under_way[chosen] += 1
                    return chosen
                self._changed.wait()

    def _give_back(self, connection: Connection) -> None:
        with self._changed:
            if connection in self._under_way:
                self._under_way[connection] -= 1
            self._changed.notify_all()

    def _leave_out(self, connection: Connection, error: GaveUp) -> None:
        with self._changed:
            if self._under_way.pop(connection, None) is None:
                return
            left, url = len(self._under_way), connection.config.url
            self._gone = f"no server is left, the last to fail was {url}: {error}"
        logger.warning("server %s is left out from now on: %s; %d of %d are left", url, error, left, len(self.connections))


class AnswerServers(TargetServer):
    """The servers that write answers, of which there may be one. To be used in a `with` statement."""

    def __init__(self, config: AnswerServerConfig) -> None:
        super().__init__(config)
        alone = [config.model_copy(update={"url": url, "more_urls": []}) for url in config.more_urls]
        self.each: list[TargetServer] = [self] if not alone else [TargetServer(config), *map(TargetServer, alone)]
        if alone:
            self.connection.close()
            self.connection = SharedConnection([each.connection for each in self.each])

    def check_model(self) -> Model:
        """Check each server, and return the description with the shortest context; see `TargetServer.check_model`."""
        if self.each == [self]:
            return super().check_model()
        return min((each.check_model() for each in self.each), key=lambda model: model.max_model_len or math.inf)
