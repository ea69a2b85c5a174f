"""
A small Hub in this process: the routes that `huggingface_hub` uses to create, upload, commit, look up and download.

Git LFS with its basic transfer, no xet. Everything is kept in memory; nothing asks for a token.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
LFS = (".safetensors", ".bin", ".parquet", ".pt")


class Hub(ThreadingHTTPServer):
    """Its repositories are `files[(kind, name)][path]`, kind `"model"` or `"dataset"`; `asked` holds the routes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.commits: list[tuple[tuple[str, str], str, list[str]]] = []
        self.asked: set[str] = set()
        self.unknown: list[str] = []
        self.tokens: set[str] = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name, folder):
        """A model that is there from the start."""
        self.files["model", name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serve():
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


REPO = r"(?P<name>[\w.-]+/[\w.-]+)"
API = rf"/api/(?P<kind>model|dataset)s/{REPO}"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"{API}/preupload/[^/]+", "preupload"),
    ("POST", rf"/(?P<kind>datasets/)?{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "lfs_upload"),
    ("POST", rf"{API}/commit/[^/]+", "commit"),
    ("GET", rf"{API}(/revision/[^/]+)?", "info"),
    ("GET", rf"{API}/tree/[^/]+(?P<path>/.*)?", "tree"),
    ("GET|HEAD", rf"/(?P<kind>datasets/)?{REPO}/resolve/[^/]+/(?P<path>.+)", "resolve"),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value, status=200, **headers):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}
        for key, text in headers.items():
            self.send_header(key.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code):
        self.answer({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)

    def handle_request(self):
        data, path = self.body(), unquote(urlsplit(self.path).path)
        self.server.tokens |= {token for token in [self.headers.get("Authorization")] if token}
        for methods, pattern, name in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                self.server.asked.add(name)
                given = match.groupdict()
                if "kind" in given:
                    kind = "dataset" if (given.pop("kind") or "").startswith("dataset") else "model"
                    given["repo"] = (kind, given.pop("name"))
                    if given["repo"] not in self.server.files:
                        return self.missing("RepoNotFound")
                return getattr(self, name)(data, **given)
        self.server.unknown.append(f"{self.command} {self.path}")
        return self.missing("Unknown")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    # Routes

    def whoami(self, data):
        self.answer({"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, data):
        wanted = json.loads(data)
        repo = (wanted.get("type") or "model", f"{wanted.get('organization') or 'me'}/{wanted['name']}")
        known = repo in self.server.files
        self.server.files.setdefault(repo, {})
        prefix = "datasets/" if repo[0] == "dataset" else ""
        url = f"{self.server.url}/{prefix}{repo[1]}"
        self.answer({"url": url, "name": repo[1], "id": "0"}, 409 if known else 200)

    def validate(self, data):
        self.answer({"errors": [], "warnings": []})

    def preupload(self, data, repo):
        files = json.loads(data)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular", "shouldIgnore": False}
            for f in files
        ]
        self.answer({"files": modes})

    def lfs_batch(self, data, repo):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}"}}}
            for each in json.loads(data)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_upload(self, data, oid):
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.blobs[oid] = data
        self.answer({})

    def commit(self, data, repo):
        header, *changes = [json.loads(line) for line in data.splitlines()]
        for change in changes:
            value = change["value"]
            regular = change["key"] == "file"
            content = base64.b64decode(value["content"]) if regular else self.server.blobs[value["oid"]]
            self.server.files[repo][value["path"]] = content
        paths = [change["value"]["path"] for change in changes]
        self.server.commits.append((repo, header["value"]["summary"], paths))
        self.answer({"commitUrl": f"{self.server.url}/{repo[1]}/commit/{COMMIT}", "commitOid": COMMIT})

    def info(self, data, repo):
        siblings = [{"rfilename": path} for path in self.server.files[repo]]
        self.answer({"_id": "0", "id": repo[1], "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})

    def tree(self, data, repo, path):
        folder = (path or "").strip("/")
        paths = {name: content for name, content in self.server.files[repo].items() if name.startswith(folder)}
        if folder and not paths:
            return self.missing("EntryNotFound")
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in paths.items()
        ]
        return self.answer(entries)

    def resolve(self, data, repo, path):
        if path not in self.server.files[repo]:
            return self.missing("EntryNotFound")
        content = self.server.files[repo][path]
        return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
