"""Bars of the ratios to the plain file, as SVG."""

from html import escape

COLOURS = ["#1f77b4", "#bbbbbb", "#2ca02c", "#888888", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2"]
LEFT, WIDTH, BAR, GAP = 300, 700, 9, 8
FULL = 1.25  # the ratio at the right edge


def svg(rows: list[dict], peers: list[str]) -> str:
    peers = [peer for peer in peers if peer != "plain"]
    parts, y = [], 30
    for i, peer in enumerate(peers):
        x = LEFT + i * WIDTH // len(peers)
        parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="15">{escape(peer)}</text>')
    for row in rows:
        label = f"{row['file']}: {row['reader']}, {row['state']}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + BAR}" text-anchor="end">{escape(label)}</text>')
        for i, peer in enumerate(peers):
            ratio = row["peers"].get(peer, {}).get("ratio")
            if ratio is None:
                continue
            width = min(ratio / FULL, 1) * WIDTH
            colour = COLOURS[i % len(COLOURS)]
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 3:.1f}" y="{y + BAR - 2}" font-size="8">{ratio:.2f}</text>')
            y += BAR
        y += GAP
    one = LEFT + WIDTH / FULL
    parts.append(f'<line x1="{one}" y1="24" x2="{one}" y2="{y}" stroke="#888" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{one}" y="{y + 12}" text-anchor="middle">the plain file</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{y + 20}"'
    return f'{head} font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
