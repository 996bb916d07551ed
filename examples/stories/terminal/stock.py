"""A stock book for a small shop. All of it is in memory: whoever kills this program loses the stock.

Speaks lines over TCP: `hello NAME`, `add ITEM N`, `take ITEM N`, `list`, `asked`. Each conversation has its own memory, too.
"""

import socketserver
import sys
import threading

stock: dict[str, int] = {}
guests = 0
lock = threading.Lock()
log = open("stock.log", "a", buffering=1)  # noqa: SIM115  open as long as the program runs


class Conversation(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.name, self.asked = "somebody", 0
        for line in self.rfile:
            with lock:
                answer = self.answer(*line.decode().split())
            self.wfile.write(f"{answer}\n".encode())

    def answer(self, verb: str = "", item: str = "", number: str = "0") -> str:
        global guests
        self.asked += 1
        if verb == "hello":
            guests += 1
            self.name = item
            return f"hello {item}, you are guest {guests}"
        if verb == "list":
            return " ".join(f"{name}={count}" for name, count in sorted(stock.items())) or "nothing"
        if verb == "asked":
            return f"{self.name} asked {self.asked} times"
        if verb in ("add", "take") and number.isdigit():
            change = int(number) if verb == "add" else -int(number)
            if stock.get(item, 0) + change < 0:
                return f"only {stock.get(item, 0)} {item} left"
            stock[item] = stock.get(item, 0) + change
            print(self.name, verb, item, number, file=log)
            return f"{item} {stock[item]}"
        return f"what is {verb}?"


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("127.0.0.1", int(sys.argv[1])), Conversation).serve_forever()
