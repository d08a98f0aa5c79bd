// The pointer reads the charts. Everything else on the page works without this.
(() => {
  const tip = document.getElementById("tip");
  const ns = "http://www.w3.org/2000/svg";
  const make = (name, attributes) => {
    const node = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  for (const svg of document.querySelectorAll("svg[data-points]")) {
    const { x: axis, s: series } = JSON.parse(svg.dataset.points);
    const cursor = svg.querySelector(".cursor");
    const leave = () => { cursor.replaceChildren(); tip.style.display = "none"; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const near = series.filter((one) => one.p.length).map((one) => ({
        name: one.n, color: one.c,
        point: one.p.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best),
      }));
      if (!near.length) return;
      const px = near.reduce((best, one) => Math.abs(one.point[0] - at) < Math.abs(best - at) ? one.point[0] : best, 1e9);
      const shown = near.filter((one) => Math.abs(one.point[0] - px) < 12);
      cursor.replaceChildren(
        make("line", { x1: px, x2: px, y1: svg.dataset.top, y2: svg.dataset.bottom }),
        ...shown.map((one) => make("circle", { class: `dot c${one.color}`, cx: one.point[0], cy: one.point[1], r: 4 })),
      );
      const head = document.createElement("div");
      head.textContent = `${axis} ${shown[0].point[2]}`;
      tip.replaceChildren(head, ...shown.map((one) => {
        const row = document.createElement("div");
        const swatch = document.createElement("i");
        swatch.className = `swatch fill c${one.color}`;
        const value = document.createElement("b");
        value.textContent = one.point[3];
        row.append(swatch, one.name, value);
        return row;
      }));
      tip.style.display = "block";
      const side = event.clientX + tip.offsetWidth + 30 > innerWidth ? -tip.offsetWidth - 14 : 16;
      tip.style.left = `${Math.max(6, event.clientX + side)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
  }
})();
