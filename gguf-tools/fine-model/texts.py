"""The texts of four kinds as documents (source, name, text), read from unpacked Debian
packages (fetch.sh). Every function names the files it takes; `KINDS` lists them all."""
import glob, gzip, html, os, re, subprocess, zlib

PLAIN = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-", "\u2014": "--",
                       "\u2026": "...", "\u00a0": " ", "\u2011": "-", "\u2022": "*", "\t": "\t", "\ufeff": None})


def read(path):
    with (gzip.open if path.endswith((".gz", ".dz")) else open)(path, "rb") as f:
        data = f.read()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def tidy(text):
    """Typographic quotes and dashes as ASCII, no trailing blanks, at most two empty lines."""
    text = text.replace("\r\n", "\n").translate(PLAIN)
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


def files(root, under, pattern, skip=r"(?!)"):
    """(path below `under`, text) of every file that matches, in order of name."""
    base = os.path.join(root, under)
    for path in sorted(glob.glob(os.path.join(base, pattern), recursive=True)):
        name = path[len(base):].lstrip("/")
        if os.path.isfile(path) and not re.search(skip, name):
            yield name, read(path)


def untag(page):
    page = re.sub(r"(?is)<(head|script|style|nav)\b.*?</\1>", "", page)
    page = re.sub(r"(?i)</?(p|div|h\d|pre|table|tr|ul|ol|dl|dt|dd|blockquote|hr)\b[^>]*>", "\n\n", page)
    page = re.sub(r"(?i)<(br|li)\b[^>]*>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]*>", "", page))
    return re.sub(r"\n\s*\n+", "\n\n", page)


# ---- prose

def bible(root):
    """The King James Bible: a verse a line, a blank line between chapters, a document a book."""
    env = dict(os.environ, LD_LIBRARY_PATH=os.path.join(root, "usr/lib"))
    out = subprocess.run([os.path.join(root, "usr/bin/bible"), "-f", "-p", os.path.join(root, "usr/lib"),
                          "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, env=env,
                         check=True).stdout.decode("latin-1")
    books, last = {}, None
    for line in out.splitlines():
        m = re.match(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$", line)
        if not m:
            raise SystemExit(f"bible printed {line!r}, not `Book1:1 text`")
        book, chapter, _, verse = m.groups()
        text = books.setdefault(book, [])
        if last not in (None, (book, chapter)) and text:
            text.append("")
        last = (book, chapter)
        text.append(verse.strip())
    for book, lines in books.items():
        yield "bible-kjv-text", book, "\n".join(lines)


def austen(root):
    """Six novels; a document a chapter. R's lazy-load database is a row of zlib streams (each after its
    length), and a character vector in one is a row of (flags, length, bytes)."""
    data = open(os.path.join(root, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"), "rb").read()
    while len(data) > 4:
        z = zlib.decompressobj()
        blob = z.decompress(data[4:])
        data = z.unused_data
        lines = list(strings(blob))
        if len(lines) < 1000:
            continue
        title = lines[0].strip().title()
        text = "\n".join(lines)
        for i, part in enumerate(re.split(r"(?im)^(?=chapter +[\divxlc]+\.?\s*$)", text)):
            if len(part) > 1500:
                yield "r-cran-janeaustenr", f"{title}/{i}", part


def strings(blob):
    i = blob.find(b"\x00\x00\x00\x10")  # the vector's own flags, then its length
    i += 8
    while i + 8 <= len(blob):
        flags, n = int.from_bytes(blob[i:i + 4], "big"), int.from_bytes(blob[i + 4:i + 8], "big")
        if flags & 0xff != 9 or n > 1 << 16:
            return
        yield blob[i + 8:i + 8 + n].decode()
        i += 8 + n


def anarchism(root):
    """An Anarchist FAQ: expository prose; the pages that only join others are left out."""
    for name, text in files(root, "usr/share/doc/anarchism/markdown", "sec[A-J][0-9]*.md.gz"):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        yield "anarchism", name, re.sub(r"(\*\*|(?<!\w)_|_(?!\w))", "", text)


def jargon(root):
    text = read(os.path.join(root, "usr/share/doc/jargon-text/jargon.txt.gz"))
    for i in range(0, len(text), 40000):
        yield "jargon-text", str(i // 40000), text[i:i + 40000]


def devil(root):
    text = read(os.path.join(root, "usr/share/dictd/devil.dict.dz"))
    yield "dict-devil", "devil", text[text.index("PREFACE"):]


def opticks(root):
    """Newton's Opticks, among the test data of Go."""
    text = read(os.path.join(root, "usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt"))
    for i in range(0, len(text), 40000):
        yield "golang-1.19-src", f"Opticks/{i // 40000}", text[i:i + 40000]


# ---- code

def python(root):
    for name, text in files(root, "usr/lib/python3.11", "**/*.py",
                            r"test|_sysconfigdata|pydoc_data|encodings/|turtle|lib2to3|idlelib|_pydecimal|this\.py"):
        yield "libpython3.11-stdlib", name, text


def golang(root):
    for name, text in files(root, "usr/share/go-1.19/src", "**/*.go",
                            r"_test\.go|testdata|^cmd/(compile|vendor|asm|link|internal/obj)|^vendor|zsys|ztypes|zerr"
                            r"|rewrite|tables|_string\.go|syscall/z|^internal/trace|opGen|example_"):
        yield "golang-1.19-src", name, text


def rust(root):
    for name, text in files(root, "usr/src/rustc-1.63.0/library", "**/*.rs",
                            r"stdarch|/tests?/|tests?\.rs|benches|backtrace|portable-simd|tables|os/.*/raw|unicode_data"):
        yield "rust-src", name, text


def perl(root):
    for name, text in files(root, "usr/share/perl/5.36.0", "**/*.pm", r"Unicode/Collate|unicore|Locale|Encode/"):
        yield "perl-modules-5.36", name, re.split(r"(?m)^__(?:END|DATA)__", text)[0]


def ruby(root):
    for name, text in files(root, "usr/lib/ruby", "**/*.rb", r"tables|unicode_normalize|rdoc/(ri|generator)|/test/"
                            r"|gem_prelude|_data"):
        yield "libruby3.1", name, text


def c(root):
    for base in glob.glob(os.path.join(root, "usr/src/linux-headers-*-common")):
        for sub in ("include/linux", "include/net"):
            for name, text in files(root, os.path.relpath(os.path.join(base, sub), root), "**/*.h",
                                    r"mlx|soc/|regs|mfd/|platform_data|firmware/"):
                yield "linux-headers-common", sub + "/" + name, text


# ---- technical documentation

def python_doc(root):
    for name, text in files(root, "usr/share/doc/python3.11/html/_sources", "**/*.rst.txt", r"changelog|license"):
        yield "python3.11-doc", name, text


def linux_doc(root):
    for name, text in files(root, "usr/share/doc/linux-doc-6.1/html/_sources", "**/*.rst.txt*",
                            r"translations|media/.*/(pixfmt|subdev)|features|/ABI|gpu/amdgpu/.*asic|maintainers"):
        yield "linux-doc-6.1", name, text


def perl_doc(root):
    for name, text in files(root, "usr/share/perl/5.36.0", "**/*.pod", r"delta\.pod|perl(cn|jp|ko|tw|uniprops|api|intern)"):
        yield "perl-doc", name, text


def vim_doc(root):
    for name, text in files(root, "usr/share/vim/vim90/doc", "*.txt*", r"version\d|tags|todo"):
        yield "vim-runtime", name, text


def git_doc(root):
    for name, text in files(root, "usr/share/doc/git-doc", "**/*.txt", r"RelNotes"):
        yield "git-doc", name, text


def node_doc(root):
    for name, text in files(root, "usr/share/doc/nodejs/api", "*.md.gz", r"all\.md|documentation"):
        yield "nodejs-doc", name, text


def postgres_doc(root):
    for name, text in files(root, "usr/share/doc/postgresql-doc-15/html", "*.html",
                            r"release|bookindex|features-sql|sql-keywords|errcodes|index\.html"):
        yield "postgresql-doc-15", name, untag(text)


def debian_doc(root):
    for name, text in files(root, "usr/share/doc/debian-handbook/html/en-US", "*.html", r"ix\d|index"):
        yield "debian-handbook", name, untag(text)
    for name, text in files(root, "usr/share/doc/debian-policy", "*.txt.gz", r"upgrading|changelog|README"):
        yield "debian-policy", name, text


# ---- dialogue

def wesnoth(root):
    """Campaign scenarios: the story, then who says what."""
    for name, text in files(root, "usr/share/games/wesnoth/1.16/data/campaigns", "**/*.cfg"):
        text = re.sub(r"(?m)^\s*#.*$", "", text)
        out = []
        for m in re.finditer(r"(?s)\[message\](.*?)\[/message\]|\bstory\s*=\s*(.*?)(?=\n\s*[\w\[])", text):
            said = quoted(re.sub(r"(?s).*?\bmessage\s*=", "", m[1], count=1) if m[1] else m[2])
            if len(said) < 3:
                continue
            who = re.search(r"\b(?:speaker|role|caption)\s*=\s*_?\s*\"?([^\n\"$]+)", m[1] or "")
            who = who[1].strip() if who else "narrator"
            narrated = who in ("narrator", "unit", "second_unit")
            out.append(said if narrated else f"{who}: {said}")
        if len(out) > 4:
            yield "wesnoth-1.16", name, "\n".join(out)


def quoted(s):
    """The first run of WML's string pieces, `_ "..." + _ "..."`."""
    m = re.match(r'\s*_?\s*((?:"(?:[^"]|"")*"\s*\+?\s*_?\s*)+)', s)
    said = "".join(p.replace('""', '"') for p in re.findall(r'"((?:[^"]|"")*)"', m[1])) if m else ""
    return re.sub(r"\s*\n\s*", " ", re.sub(r"<[^>]*>", "", said)).strip()


def endless_sky(root):
    """Missions: narrated paragraphs, and the answers to choose from, each after `> `."""
    words = {"last": "Reyes", "first": "Alex", "planet": "New Boston", "destination": "New Boston", "origin": "Harmony",
             "payment": "20,000 credits", "ship": "Wayfarer", "system": "Rutilicus", "stopovers": "Glaze",
             "cargo": "the cargo", "bunks": "three", "npc": "the Raven", "date": "the tenth of March"}
    for name, text in files(root, "usr/share/games/endless-sky/data", "*.txt"):
        for i, mission in enumerate(re.split(r"(?m)^(?=mission |conversation |event )", text)):
            out, level = [], None
            for line in mission.splitlines():
                depth = len(line) - len(line.lstrip("\t"))
                if line.strip() == "choice":
                    level = depth
                    continue
                m = re.match(r"\t+`\s*(.*)`$", line)
                if not m or not m[1]:
                    continue
                said = re.sub(r"<(\w+)>", lambda w: words.get(w[1], w[1]), m[1])
                if level is not None and depth == level + 1:
                    out.append("> " + said)
                else:
                    level = None
                    out.append(said)
            if sum(map(len, out)) > 300:
                yield "endless-sky-data", f"{name}/{i}", "\n".join(out)


def freedroid(root):
    """What Tux and the other say, in the order of the file."""
    for name, text in files(root, "usr/share/freedroidrpg/data", "**/dialogs/*.lua"):
        npc, out = os.path.basename(name)[:-4].replace("_", " "), []
        for m in re.finditer(r'(Npc:says\w*|Tux:says\w*|cli_says|text\s*=)\s*\(?\s*_?"((?:[^"\\]|\\.)*)"', text):
            said = m[2].replace('\\"', '"').replace("\\n", " ")
            who = npc if m[1].startswith("Npc") else "Terminal" if m[1].startswith("cli") else "Tux"
            if len(said) > 3 and not said.startswith("BUG"):
                out.append(f"{who}: {said}")
        if len(out) > 4:
            yield "freedroidrpg-data", name, "\n".join(out)


def naev(root):
    for name, text in files(root, "usr/share/naev/dat", "**/*.lua"):
        found = re.findall(r'(?s)_\(\s*(?:\[\[(.*?)\]\]|"((?:[^"\\]|\\.)*)")\s*\)', text)
        out = [re.sub(r"\s+", " ", (a or b).replace('\\"', '"')).strip() for a, b in found]
        out = [s for s in out if len(s) > 60]
        if sum(map(len, out)) > 1500:
            yield "naev-data", name, "\n\n".join(out)


def flare(root):
    for name, text in files(root, "usr/share/games/flare/mods", "**/npcs/*.txt"):
        m = re.search(r"(?m)^name=(.*)", text)
        who = m[1].split(",")[0] if m else "Stranger"
        out = []
        for m in re.finditer(r"(?m)^(him|her|you|\[dialog\])=?(.*)", text):
            if m[2]:
                out.append(("You" if m[1] == "you" else who) + ": " + m[2])
            elif out and out[-1]:
                out.append("")
        if sum(map(len, out)) > 300:
            yield "flare-game", name, "\n".join(out)


def fillets(root):
    """Two fish talk; `dialogId("...-m-..", "font_small", "..")`."""
    who = {"font_small": "Small", "font_big": "Big"}
    for name, text in files(root, "usr/share/games/fillets-ng/script", "**/dialogs_en.lua"):
        out = [f"{who.get(m[0], 'Other')}: {m[1]}" for m in
               re.findall(r'dialogId\("[^"]*",\s*"([^"]*)",\s*"((?:[^"\\]|\\.)+)"\)', text)]
        if len(out) > 3:
            yield "fillets-ng-data", name, "\n".join(out)


def renpy(root):
    for name, text in files(root, "usr/share/games/renpy", "**/*.rpy", r"/tl/|screens\.rpy|gui\.rpy|options"):
        who = dict(re.findall(r'define (\w+) = Character\(_?\(?"(\w+)"', text)) | {"e": "Eileen", "m": "Me", "s": "Sylvie"}
        out = []
        for speaker, said in re.findall(r'(?m)^ +(\w+ |)"((?:[^"\\]|\\.){20,})":?$', text):
            said = re.sub(r"\{[^}]*\}", "", said.replace('\\"', '"'))
            out.append(f"{who[speaker.strip()]}: {said}" if speaker.strip() in who else said)
        if len(out) > 4:
            yield "renpy", name, "\n".join(out)


def crossfire(root):
    """What the inhabitants say; `@match` lines are the words they answer to. A document a map."""
    seen = set()
    for name, text in files(root, "usr/share/games/crossfire/maps", "**/*", r"\.py$|editor/|unlinked"):
        out = []
        for said in re.findall(r"(?s)\nmsg\n(.*?)\nendmsg", text):
            said = "\n".join(("> " + line[7:].replace("|", ", ") if line.startswith("@match ") else line)
                             for line in said.split("\n") if not re.match(r"\w+:  |@", line) or line.startswith("@match "))
            if len(said) > 60 and said not in seen:
                seen.add(said)
                out.append(said)
        if sum(map(len, out)) > 300:
            yield "crossfire-maps", name, "\n\n".join(out)


KINDS = {
    "prose": (bible, austen, anarchism, jargon, devil, opticks),
    "code": (python, golang, rust, perl, ruby, c),
    "docs": (python_doc, linux_doc, perl_doc, vim_doc, git_doc, node_doc, postgres_doc, debian_doc),
    "dialogue": (wesnoth, endless_sky, freedroid, naev, flare, fillets, renpy, crossfire),
}


def documents(root, kind):
    """All of a kind, tidied, each text once; tables of numbers and texts in other alphabets are left out."""
    seen = set()
    for source in KINDS[kind]:
        for package, name, text in source(root):
            text = tidy(text)
            odd = sum(not ch.isascii() for ch in text) / len(text)
            digits = sum(ch.isdigit() for ch in text) / len(text)
            if 250 < len(text) < 400_000 and odd < 0.02 and digits < 0.15 and text not in seen:
                seen.add(text)
                yield package, name, text
