"use strict";
// The drawing of a cluster: each rank is a cell, in its node and its island. A rank that is pointed
// at, or reached by the arrow keys, shows its groups on every axis and what it sends there. Which
// ranks form a group follows from its size and stride; none is listed in the page.
charts.drawings = {};
(() => {
  // ---- Ranks and groups: a group takes every `stride`-th of `ranks * stride` neighbouring ranks.

  const firstOf = (rank, axis) => {
    const block = axis.ranks * axis.stride;
    return Math.floor(rank / block) * block + (rank % axis.stride);
  };
  const members = (rank, axis) =>
    Array.from({length: axis.ranks}, (_, place) => firstOf(rank, axis) + place * axis.stride);

  function listed(ranks, axis) {
    const last = ranks[ranks.length - 1];
    if (axis.stride === 1) return `ranks ${ranks[0]} to ${last}`;
    if (ranks.length <= 4) return `ranks ${ranks.join(", ")}`;
    return `ranks ${ranks[0]}, ${ranks[1]}, ${ranks[2]} … ${last}, every ${axis.stride}th`;
  }
  function nodesOf(ranks, perNode) {
    const nodes = new Set(ranks.map((rank) => Math.floor(rank / perNode)));
    return nodes.size === 1 ? `inside node ${[...nodes][0]}` : `over ${nodes.size.toLocaleString("en-US")} nodes`;
  }

  // ---- Places: cells in nodes, nodes in islands, islands in rows.

  // As large as they may be: at first with rows of nodes that end where stages of the pipeline do.
  function arranged(data, width, tall) {
    const free = fitted(data, width, tall, false);
    if (data.islandNodes) return free;
    const aligned = fitted(data, width, tall, true);
    return aligned.size >= free.size * 0.6 ? aligned : free;
  }

  const GUTTER = 62; // for the names of stages

  function fitted(data, whole, tall, aligned) {
    const island = data.islandNodes, nodes = data.gpus / data.perNode, stageNodes = nodes / data.stages;
    const columns = Math.min(data.perNode, 8), rows = Math.ceil(data.perNode / columns);
    const gutter = aligned && data.stages > 1 ? GUTTER : 0, width = whole - gutter;
    for (let size = 46; ; size -= size > 12 ? 1 : 0.25) {
      const gap = size > 9 ? 2 : size > 4 ? 1 : 0;
      const nodeGap = Math.max(2, size * 0.45), islandGap = Math.max(6, size);
      const title = size >= 15 ? 15 : 0;
      const nodeWidth = columns * size + (columns - 1) * gap, nodeHeight = rows * size + (rows - 1) * gap + title;
      let fit = Math.max(1, Math.floor((width + nodeGap) / (nodeWidth + nodeGap)));
      if (aligned) while (fit > 1 && stageNodes % fit && (fit % stageNodes || nodes % fit)) fit -= 1;
      // An island is a block of nodes, wide rather than high, and islands stand beside each other.
      const across = island ? Math.min(fit, island, Math.max(1, Math.ceil(Math.sqrt(island * 0.8)))) : fit;
      const down = island ? Math.ceil(island / across) : 0;
      const islandWidth = across * (nodeWidth + nodeGap) - nodeGap;
      const islandHeight = down * (nodeHeight + nodeGap) - nodeGap;
      const beside = island ? Math.max(1, Math.floor((width + islandGap) / (islandWidth + islandGap))) : 1;
      const height = island
        ? Math.ceil(nodes / island / beside) * (islandHeight + islandGap) - islandGap
        : Math.ceil(nodes / fit) * (nodeHeight + nodeGap) - nodeGap;
      if ((height > tall || nodeWidth > width) && size > 1.5) continue;
      const nodePlace = (node) => {
        if (!island) {
          return {x: gutter + (node % fit) * (nodeWidth + nodeGap), y: Math.floor(node / fit) * (nodeHeight + nodeGap)};
        }
        const which = Math.floor(node / island), inside = node % island;
        return {
          x: (which % beside) * (islandWidth + islandGap) + (inside % across) * (nodeWidth + nodeGap),
          y: Math.floor(which / beside) * (islandHeight + islandGap) + Math.floor(inside / across) * (nodeHeight + nodeGap),
        };
      };
      const cell = (rank) => {
        const place = nodePlace(Math.floor(rank / data.perNode)), local = rank % data.perNode;
        return {
          x: place.x + (local % columns) * (size + gap),
          y: place.y + title + Math.floor(local / columns) * (size + gap), size,
        };
      };
      const stageHeight = gutter && stageNodes % fit === 0 ? stageNodes / fit * (nodeHeight + nodeGap) : 0;
      return {size, title, nodeWidth, nodeHeight, nodePlace, cell, height: Math.max(height, size), nodesAcross: island ? across : fit, stageHeight};
    }
  }

  // ---- Drawing.

  const states = new WeakMap();
  const MOST_NODES = 16; // of which all ranks are drawn at once
  const DEEP = [0, 2, 5]; // colours of the light palette on which white is read

  function element(name, attributes, parent, words) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (words !== undefined) made.textContent = words;
    if (parent) parent.append(made);
    return made;
  }

  function drawn(name, attributes, parent) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  }

  charts.drawings.topology = function (box, data, lookOf) {
    const look = lookOf(box);
    const state = states.get(box) || {rank: 0, pinned: 0, only: null};
    states.set(box, state);
    const hadFocus = box.contains(document.activeElement) && document.activeElement.tagName === "CANVAS";
    box.replaceChildren();
    box.classList.add("topology");

    const near = element("div", {class: "near", "aria-hidden": "true"}, box);
    const controls = element("div", {class: "controls screen-only"}, box);
    const label = element("label", {}, controls, "Rank ");
    const field = element("input", {type: "number", min: 0, max: data.gpus - 1, value: state.rank, inputmode: "numeric"}, label);
    element("span", {class: "quiet"}, controls, `of 0 to ${(data.gpus - 1).toLocaleString("en-US")}`);

    const width = look.width, tall = look.printed ? 420 : 560;
    const place = arranged(data, width, tall);
    const panel = element("div", {class: "rank", "aria-live": "polite"}, box);
    const nodes = data.gpus / data.perNode;
    const isMany = nodes > MOST_NODES;
    const all = element(isMany ? "details" : "div", {class: "all"}, box);
    if (isMany) {
      all.open = state.isOpen === true;
      all.addEventListener("toggle", () => { state.isOpen = all.open; });
      element("summary", {}, all, `All ${data.gpus.toLocaleString("en-US")} ranks`);
    }
    const canvas = element("canvas", {
      tabindex: 0, role: "application",
      "aria-label": `${data.gpus.toLocaleString("en-US")} ranks on ${(data.gpus / data.perNode).toLocaleString("en-US")} nodes. ` +
        "Arrow keys move among ranks, page up and down among nodes, home and end to the first and last.",
    }, all);
    const scale = look.printed ? 3 : Math.max(1, window.devicePixelRatio || 1);
    const base = document.createElement("canvas");
    for (const one of [canvas, base]) {
      one.width = Math.ceil(width * scale);
      one.height = Math.ceil(place.height * scale);
    }
    canvas.cellOf = place.cell; // where a rank is, for whoever asks the element
    canvas.style.width = width + "px";
    canvas.style.height = place.height + "px";

    const context = base.getContext("2d");
    context.scale(scale, scale);
    const stageRanks = data.gpus / data.stages;
    const tints = look.dark ? ["#3b4656", "#4c596c"] : ["#d3d9e1", "#bcc5d0"];
    for (let rank = 0; rank < data.gpus; rank += 1) {
      const {x, y, size} = place.cell(rank);
      context.fillStyle = tints[Math.floor(rank / stageRanks) % 2];
      context.fillRect(x, y, size, size);
    }
    context.fillStyle = look.quiet;
    context.font = `11px ${look.font}`;
    if (place.title) {
      for (let node = 0; node < data.gpus / data.perNode; node += 1) {
        const at = place.nodePlace(node);
        context.fillText((place.nodeWidth > 70 ? "node " : "") + node, at.x, at.y + 11);
      }
    }

    if (place.stageHeight) {
      const every = Math.ceil(15 / place.stageHeight);
      for (let stage = 0; stage < data.stages; stage += every) {
        context.fillText(`stage ${stage + 1}`, 0, stage * place.stageHeight + place.title + Math.min(place.stageHeight - 2, place.size / 2 + 6));
      }
    }

    const colorOf = (axis) => look.colors[axis.color];
    const inkOn = (axis) => look.dark ? "#10151c" : DEEP.includes(axis.color) ? "#ffffff" : "#1d2430";
    const swollen = place.size < 6 ? 1 : 0; // so that a few among thousands are seen

    function paint() {
      const to = canvas.getContext("2d");
      to.setTransform(1, 0, 0, 1, 0, 0);
      to.clearRect(0, 0, canvas.width, canvas.height);
      to.drawImage(base, 0, 0);
      to.scale(scale, scale);
      // The widest groups first: a rank that is in several has the colour of the narrowest.
      const axes = data.axes.filter((axis) => state.only === null || axis.name === state.only);
      for (const axis of [...axes].sort((one, other) => other.ranks - one.ranks)) {
        to.fillStyle = colorOf(axis);
        to.globalAlpha = axis.ranks > data.gpus / 2 && data.gpus > 16 ? 0.45 : 1; // all of them would shout
        for (const rank of members(state.rank, axis)) {
          const {x, y, size} = place.cell(rank);
          to.fillRect(x - swollen, y - swollen, size + 2 * swollen, size + 2 * swollen);
        }
      }
      to.globalAlpha = 1;
      const {x, y, size} = place.cell(state.rank);
      to.fillStyle = look.ink;
      to.fillRect(x, y, size, size);
      if (size < 9) {
        to.strokeStyle = look.ink;
        to.lineWidth = 1.5;
        to.strokeRect(x - 4, y - 4, size + 8, size + 8);
      }
      if (size >= 20) {
        to.font = `${size >= 30 ? 12 : 9.5}px ${look.font}`;
        to.textAlign = "center";
        to.textBaseline = "middle";
        const shown = new Map();
        for (const axis of [...axes].sort((one, other) => other.ranks - one.ranks)) {
          for (const rank of members(state.rank, axis)) shown.set(rank, axis);
        }
        for (let rank = 0; rank < data.gpus; rank += 1) {
          const at = place.cell(rank);
          to.fillStyle = rank === state.rank ? look.card : shown.has(rank) ? inkOn(shown.get(rank)) : look.ink;
          to.fillText(String(rank), at.x + size / 2, at.y + size / 2 + 0.5);
        }
      }
    }

    // ---- The node of the rank, with what joins its GPUs and what leads out of it.

    function nearby() {
      near.replaceChildren();
      const count = data.perNode;
      if (count > 16 || data.gpus === 1) return;
      const node = Math.floor(state.rank / count), size = Math.min(54, (width - 8) / count - 6), step = size + 6;
      const inner = data.levels[0], outers = data.levels.slice(1).filter((level) => level.gpus > count);
      const outer = outers[0], span = count * step - 6;
      const top = outer ? 74 : 20, height = top + size * 0.72 + 40;
      const svg = drawn("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "font-family": look.font, "font-size": 11}, near);
      const say = (x, y, words, more = {}) => { drawn("text", {x, y, fill: look.quiet, ...more}, svg).textContent = words; };
      if (outer) {
        drawn("rect", {x: 0, y: 18, width: span, height: 5, rx: 2.5, fill: look.quiet}, svg);
        // Of the ports of a domain that is larger than a node, those that are this node's.
        const domain = data.levels[data.levels.indexOf(outer) - 1].gpus;
        const own = Math.max(1, Math.round(outer.ports * Math.min(1, count / domain)));
        const rate = charts.written(outer.bandwidth, "wire_bytes");
        say(0, 12, `${outer.name}: ${own} × ${rate}/s out of node ${node}, joins ${outer.gpus.toLocaleString("en-US")}`);
        const ports = Math.min(own, Math.max(1, Math.floor(span / 26)));
        for (let port = 0; port < ports; port += 1) {
          const x = (port + 0.5) * span / ports;
          drawn("line", {x1: x, y1: 23, x2: x, y2: 40, stroke: look.quiet, "stroke-width": 2}, svg);
          drawn("rect", {x: x - 11, y: 38, width: 22, height: 15, rx: 3, fill: look.card, stroke: look.quiet}, svg);
          say(x, 49.5, data.rails ? `r${Math.floor(port * data.rails / ports)}` : String(port), {"text-anchor": "middle", "font-size": 10});
        }
        for (let local = 0; local < count; local += 1) {
          const port = Math.floor(local * ports / count);
          drawn("line", {x1: (port + 0.5) * span / ports, y1: 53, x2: local * step + size / 2, y2: top, stroke: look.line, "stroke-width": 1.5}, svg);
        }
      }
      for (let local = 0; local < count; local += 1) {
        const rank = node * count + local;
        const axis = data.axes.filter((one) => state.only === null || one.name === state.only)
          .sort((one, other) => one.ranks - other.ranks).find((one) => firstOf(rank, one) === firstOf(state.rank, one));
        const group = drawn("g", {style: "cursor:pointer"}, svg);
        drawn("rect", {x: local * step, y: top, width: size, height: size * 0.72, rx: 5,
          fill: rank === state.rank ? look.ink : axis ? colorOf(axis) : tints[0]}, group);
        say(local * step + size / 2, top + size * 0.36 + 4, String(rank), {"text-anchor": "middle", "font-size": size > 44 ? 12 : 10,
          "pointer-events": "none", fill: rank === state.rank ? look.card : axis ? inkOn(axis) : look.ink});
        group.addEventListener("click", () => go(rank, true));
      }
      if (nodes > 1 && width - span > 90) say(span + 14, top + size * 0.36 + 7, `× ${nodes.toLocaleString("en-US")}`, {"font-size": 22, fill: look.ink});
      const low = top + size * 0.72 + 8, domain = Math.min(inner.gpus, count);
      for (let first = 0; first < count; first += domain) {
        drawn("rect", {x: first * step, y: low, width: domain * step - 6, height: 5, rx: 2.5, fill: look.quiet}, svg);
      }
      say(0, low + 20, `${inner.name}: ${charts.written(inner.bandwidth * inner.ports, "wire_bytes")}/s for each ${data.unit}, joins ${inner.gpus.toLocaleString("en-US")}` +
        (nodes > 1 ? `; ${nodes.toLocaleString("en-US")} such nodes` : ""));
    }

    // ---- What is said of the rank.

    function describe() {
      const rank = state.rank, node = Math.floor(rank / data.perNode), local = rank % data.perNode;
      panel.replaceChildren();
      const where = [`rank ${rank.toLocaleString("en-US")}: ${data.unit} ${local} of node ${node.toLocaleString("en-US")}`];
      if (data.islandNodes) where.push(`island ${Math.floor(node / data.islandNodes)}`);
      if (data.rails) where.push(`rail ${Math.floor(local * data.rails / data.perNode)}`);
      if (data.stages > 1) where.push(`pipeline rank ${Math.floor(rank / stageRanks) + 1} of ${data.stages}`);
      element("p", {class: "where"}, panel, where.join(", "));
      const list = element("ul", {class: "axes"}, panel);
      for (const axis of data.axes) {
        const ranks = members(rank, axis);
        const item = element("li", {"data-axis": axis.name, "data-ranks": ranks.join(" ")}, list);
        const button = element("button", {
          type: "button", "aria-pressed": String(state.only === axis.name),
          title: "Show this axis alone, or all again",
        }, item);
        const swatch = element("span", {class: "swatch", "aria-hidden": "true"}, button);
        swatch.style.background = colorOf(axis);
        button.append(`${axis.name} ${axis.ranks.toLocaleString("en-US")}`);
        button.addEventListener("click", () => {
          state.only = state.only === axis.name ? null : axis.name;
          update();
          const again = panel.querySelector(`[data-axis="${CSS.escape(axis.name)}"] button`);
          if (again) again.focus();
        });
        const words = element("div", {}, item);
        element("div", {}, words, `${axis.words}: ${listed(ranks, axis)}; ${nodesOf(ranks, data.perNode)}, by ${axis.level}`);
        for (const call of axis.traffic) {
          element("div", {class: "quiet"}, words,
            `${call.collective} × ${call.count.toLocaleString("en-US")} a step: ${charts.written(call.bytes, "wire_bytes")} ` +
            `of ${call.dtype} in ${charts.written(call.seconds, "seconds")}, ` +
            (call.exposed > 1e-9 ? `${charts.written(call.exposed, "seconds")} of it waited for` : "all of it hidden"));
        }
        if (!axis.traffic.length) element("div", {class: "quiet"}, words, "no traffic of its own in a step");
      }
      if (!data.axes.length) element("p", {class: "quiet"}, panel, "It is alone: no group, no traffic.");
    }

    function update() {
      if (Number(field.value) !== state.rank) field.value = state.rank; // what is typed stays
      paint();
      nearby();
      describe();
    }
    function go(rank, pin) {
      const inside = Math.min(data.gpus - 1, Math.max(0, rank));
      if (pin) state.pinned = inside;
      if (inside === state.rank) return;
      state.rank = inside;
      update();
    }

    // The nearest rank to a place on the canvas, within a finger's reach.
    function at(event) {
      const bounds = canvas.getBoundingClientRect();
      const x = (event.clientX - bounds.left) * (width / bounds.width), y = (event.clientY - bounds.top) * (width / bounds.width);
      let nearest = null, least = Math.max(8, place.size * 0.8) ** 2;
      const node = nodeAt(x, y);
      for (const one of node) {
        for (let rank = one * data.perNode; rank < Math.min(data.gpus, (one + 1) * data.perNode); rank += 1) {
          const cell = place.cell(rank);
          const dx = Math.max(cell.x - x, 0, x - cell.x - cell.size), dy = Math.max(cell.y - y, 0, y - cell.y - cell.size);
          const far = dx * dx + dy * dy;
          if (far < least) { least = far; nearest = rank; }
          if (far === 0) return rank;
        }
      }
      return nearest;
    }
    function nodeAt(x, y) {
      const found = [];
      for (let node = 0; node < data.gpus / data.perNode; node += 1) {
        const one = place.nodePlace(node);
        if (x > one.x - 8 && x < one.x + place.nodeWidth + 8 && y > one.y - 8 && y < one.y + place.nodeHeight + 8) found.push(node);
      }
      return found;
    }

    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "mouse") return;
      const rank = at(event);
      if (rank !== null) go(rank, false);
    });
    canvas.addEventListener("pointerleave", () => go(state.pinned, true));
    canvas.addEventListener("click", (event) => {
      const rank = at(event);
      if (rank !== null) go(rank, true);
    });
    field.addEventListener("input", () => {
      const rank = Number(field.value);
      if (field.value !== "" && Number.isInteger(rank) && rank >= 0 && rank < data.gpus) go(rank, true);
    });
    canvas.addEventListener("keydown", (event) => {
      const row = place.nodesAcross * data.perNode;
      const steps = {
        ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, PageDown: data.perNode, PageUp: -data.perNode,
      };
      let rank = null;
      if (event.key in steps) rank = state.rank + steps[event.key];
      if (event.key === "Home") rank = 0;
      if (event.key === "End") rank = data.gpus - 1;
      if (rank === null || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      if (rank >= 0 && rank < data.gpus) go(rank, true);
    });

    box.style.height = "auto";
    update();
    if (hadFocus) canvas.focus({preventScroll: true});
  };
})();
