//! What becomes of agents and of their control plane within a case.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dataplane_common::{ABI_SAME_SINCE, ABI_VERSION};

use super::super::case::AgentChange;
use super::super::world::Key;
use super::Run;

/// An agent that starts without a control plane serves by then.
const SERVES_WITHIN: Duration = Duration::from_secs(60);
/// Agents that are to be away for a while.
const AWAY_FOR: Duration = Duration::from_millis(200);

impl Run<'_> {
    pub(super) fn agent(&mut self, what: AgentChange) -> Result<()> {
        let names: Vec<String> = self.cluster.nodes.keys().cloned().collect();
        match what {
            AgentChange::Kill => self.stop_agents(&names, true),
            AgentChange::Start => self.start_agents(&names),
            AgentChange::GracefulRestart => {
                self.stop_agents(&names, false)?;
                self.start_agents(&names)
            }
            AgentChange::ApiDown => self.cluster.set_outage(true),
            AgentChange::ApiUp => {
                self.cluster.set_outage(false)?;
                self.programmed()
            }
            AgentChange::Upgrade => self.upgrade(&names, ABI_VERSION - 1),
            AgentChange::UpgradeLayouts => self.upgrade(&names, ABI_SAME_SINCE - 1),
            AgentChange::StoreRestart => {
                self.cluster.restart_control()?;
                self.programmed()
            }
            AgentChange::Boot => self.boot(&names),
        }
    }

    fn stop_agents(&mut self, names: &[String], kill: bool) -> Result<()> {
        names
            .iter()
            .try_for_each(|name| self.cluster.stop_agent(name, kill))
    }

    fn start_agents(&mut self, names: &[String]) -> Result<()> {
        self.cluster.start_agents(names)?;
        if !self.cluster.outage {
            return Ok(());
        }
        // Nobody hears what they confirm: they are up when they answer the runtime.
        let deadline = Instant::now() + SERVES_WITHIN;
        for name in names {
            while let Err(e) = self.cluster.status(name) {
                self.cluster.alive()?;
                if Instant::now() >= deadline {
                    return Err(e.context(format!("the agent of {name} does not serve")));
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// What the agents have pinned is as if one of version `from` had: its programs and tables work on under its name.
    fn upgrade(&mut self, names: &[String], from: u32) -> Result<()> {
        self.stop_agents(names, true)?;
        for name in names {
            let pins = self.pins(name)?;
            let (now, then) = (format!("v{ABI_VERSION}"), format!("v{from}"));
            std::fs::rename(pins.join(now), pins.join(then)).context("rename the pins")?;
        }
        std::thread::sleep(AWAY_FOR);
        self.start_agents(names)
    }

    fn pins(&self, node: &str) -> Result<std::path::PathBuf> {
        let node = self.cluster.nodes.get(node).context("no such node")?;
        Ok(node.folder.join("bpf/weir"))
    }

    /// All links of a node go, but for those of the machine.
    fn remove_links(&self, node: &str) -> Result<()> {
        let node = self.cluster.nodes.get(node).context("no such node")?;
        let links: serde_json::Value =
            serde_json::from_str(&node.namespace.ip(&["-json", "link"])?)?;
        for link in links.as_array().into_iter().flatten() {
            let name = link["ifname"].as_str().unwrap_or_default();
            if name == "lo" || node.uplinks().any(|uplink| uplink == name) {
                continue;
            }
            // The other end of a pair goes with the first.
            let _gone = node.namespace.ip(&["link", "delete", name]);
        }
        Ok(())
    }

    fn boot(&mut self, names: &[String]) -> Result<()> {
        self.stop_agents(names, true)?;
        let own = |key: &&Key| {
            let pod = self.world.pods.get(*key);
            pod.is_some_and(|pod| pod.is_live() && !pod.spec.host_network)
        };
        let pods: Vec<Key> = self.world.pods.keys().filter(own).cloned().collect();
        for (namespace, name) in &pods {
            let key = crate::cases::cluster::spec::pod_key(namespace, name);
            self.cluster.pods.remove(&key);
            self.flows.retain(|_, flow| !flow.is_of(&key));
        }
        for name in names {
            remove_pins(&self.pins(name)?)?;
            self.remove_links(name)?;
            let run = self.cluster.nodes[name].folder.join("run");
            std::fs::remove_dir_all(&run)?;
            std::fs::create_dir(&run)?;
        }
        self.start_agents(names)?;
        pods.iter().try_for_each(|key| self.create(key))
    }
}

/// A bpffs has no more than files in folders.
fn remove_pins(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_pins(&path)?;
        } else {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(std::fs::remove_dir(folder)?)
}
