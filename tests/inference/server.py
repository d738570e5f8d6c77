"""An inference server: a decoder like Llama's with random weights, compiled, its decoding step captured as a graph.

server.py PORT [BILLIONS]: answers `POST /generate` with {"prompt": [token, …], "tokens": N} on the loopback address: a
line for each token, with a digest of its logits, as soon as it is there. scripts/gpu-server measures how soon that is. A request has the same answer each time, with CUBLAS_WORKSPACE_CONFIG=:4096:8.
"""
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HEAD, LONGEST, PROMPT = 32000, 128, 1024, 64
# Width and layers, by billions of parameters.
SHAPES = {1: (2048, 16), 3: (3072, 24), 7: (4096, 32)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads, inner = width // HEAD, 11008 * width // 4096
        self.before, self.between = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attend, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.heads, LONGEST, HEAD))

    def forward(self, x, at, turn, seen):
        q, k, v = self.attend(self.before(x)).view(1, -1, 3, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, turn), rotate(k, turn)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).reshape(1, -1, self.heads * HEAD))
        gate, value = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def rotate(x, turn):
    even, odd = x.float().chunk(2, -1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1).to(x.dtype)


class Decoder(nn.Module):
    """Logits of the last of the tokens that are at the positions `at`."""

    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, at):
        turn = at[:, None] * torch.pow(10000.0, -torch.arange(0, 1, 2 / HEAD, device=at.device))
        seen = torch.arange(LONGEST, device=at.device) <= at[:, None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, at, turn, seen)
        return self.head(self.norm(x[:, -1]))


class Engine:
    """The model, its compiled forms, and the graph of one decoding step."""

    def __init__(self, billions):
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = Decoder(*SHAPES[billions])
        self.model.requires_grad_(False)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
        self.compiled = torch.compile(self.model, fullgraph=True, dynamic=False)
        self.token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        self.at = torch.full((1,), PROMPT, device="cuda")
        self.step, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.compiled(self.token, self.at)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.step):
                self.logits = self.compiled(self.token, self.at)
            self.prefill([0])

    def prefill(self, prompt):
        """The prompt, behind as many zeros as make it PROMPT tokens."""
        tokens = torch.tensor([[0] * (PROMPT - len(prompt)) + prompt], device="cuda")
        return self.compiled(tokens, torch.arange(PROMPT, device="cuda"))

    @torch.no_grad()
    def generate(self, prompt, count):
        logits = self.prefill(prompt[-PROMPT:])
        for position in range(PROMPT, min(PROMPT + count, LONGEST)):
            token = int(logits.argmax())
            yield token, hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()[:16]
            self.token.fill_(token)
            self.at.fill_(position)
            self.step.replay()
            logits = self.logits


class Requests(BaseHTTPRequestHandler):
    engine = None

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for token, digest in self.engine.generate(asked["prompt"], asked["tokens"]):
            self.wfile.write(f"{token} {digest}\n".encode())

    def log_message(self, *_):
        pass


def main():
    Requests.engine = Engine(int(sys.argv[2]) if len(sys.argv) > 2 else 7)
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Requests)
    print(f"{sum(p.numel() for p in Requests.engine.model.parameters())} parameters, ready", flush=True)
    server.serve_forever()


main()
