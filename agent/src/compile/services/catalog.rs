//! What is remembered between two compilations, so that a changed Service costs what it is and not what the cluster is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::desired::{Changes, DesiredState, Name};

use super::claims::{Claimant, Claims};
use super::frontends::{Asked, Cluster, Compiled, Context};
use super::host_ports::{self, HostPort};
use super::{NodeIdentity, Owner, Refusal, ServiceKey, ServiceOptions, WantedService};
use crate::compile::node_addresses::NodeAddresses;

/// What should become of services and addresses: `None` and `false` remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// What is not named is not wanted.
    pub everything: bool,
    pub services: BTreeMap<ServiceKey, Option<WantedService>>,
    /// Addresses that answer echo requests and refuse ports that are no frontends.
    pub addresses: BTreeMap<IpAddr, bool>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Catalog {
    node: NodeIdentity,
    options: ServiceOptions,
    addresses: NodeAddresses,
    cluster: Cluster,
    zone: String,
    claims: Claims,
    keys: BTreeMap<Name, Vec<ServiceKey>>,
    /// Addresses of each Service, and how many Services have each.
    held: BTreeMap<Name, Vec<IpAddr>>,
    holders: BTreeMap<IpAddr, usize>,
    refusals: BTreeMap<Owner, Vec<Refusal>>,
    /// Services that must be compiled again when addresses of nodes change.
    depend_on_nodes: BTreeSet<Name>,
    addresses_changed: bool,
    host_ports: Vec<HostPort>,
    host_keys: BTreeSet<ServiceKey>,
    /// A whole state was compiled.
    complete: bool,
}

impl Catalog {
    #[must_use]
    pub fn new(node: NodeIdentity, options: ServiceOptions, addresses: NodeAddresses) -> Self {
        Self {
            node,
            options,
            addresses,
            cluster: Cluster::default(),
            zone: String::new(),
            claims: Claims::default(),
            keys: BTreeMap::new(),
            held: BTreeMap::new(),
            holders: BTreeMap::new(),
            refusals: BTreeMap::new(),
            depend_on_nodes: BTreeSet::new(),
            addresses_changed: false,
            host_ports: Vec::new(),
            host_keys: BTreeSet::new(),
            complete: false,
        }
    }

    /// Takes new addresses of nodes; the next [`Self::compile`] acts on them. True when there is something to do.
    pub fn set_addresses(&mut self, addresses: NodeAddresses) -> bool {
        if addresses == self.addresses {
            return false;
        }
        self.addresses = addresses;
        self.addresses_changed = true;
        true
    }

    /// For compilations from now on.
    pub fn set_options(&mut self, options: ServiceOptions) {
        self.options = options;
    }

    #[must_use]
    pub fn addresses(&self) -> &NodeAddresses {
        &self.addresses
    }

    /// The host ports of this node's pods, all of them. What follows from them alone.
    pub fn set_host_ports(&mut self, host_ports: Vec<HostPort>) -> Wanted {
        self.host_ports = host_ports;
        let mut wanted = Wanted::default();
        self.compile_host_ports(&mut wanted);
        wanted
    }

    /// What the desired state, as far as it changed, means for the maps. Nothing before the first whole state: a part
    /// of it does not say what should not be there.
    pub fn compile(&mut self, desired: &DesiredState, changes: &Changes) -> Wanted {
        let mut wanted = Wanted::default();
        if !changes.everything && !self.complete {
            return wanted;
        }
        let cluster = Cluster::new(&desired.config);
        let own = desired.nodes.get(&self.node.name);
        let zone = own.map(|node| node.zone.clone()).unwrap_or_default();
        let depends_on_all = changes.everything || cluster != self.cluster || zone != self.zone;
        (self.cluster, self.zone) = (cluster, zone);
        wanted.everything = changes.everything;
        let mut names: BTreeSet<Name> = if depends_on_all {
            desired.services.keys().cloned().collect()
        } else {
            changes.services.clone()
        };
        if depends_on_all {
            names.extend(self.claims.names().cloned());
            names.extend(self.keys.keys().cloned());
        }
        if self.addresses_changed {
            names.extend(self.depend_on_nodes.iter().cloned());
        }
        let mut affected = BTreeSet::new();
        for name in &names {
            affected.extend(self.claim(desired, name));
        }
        names.extend(affected);
        for name in &names {
            self.compile_service(desired, name, &mut wanted);
        }
        self.addresses_changed = false;
        self.complete = true;
        self.compile_host_ports(&mut wanted);
        wanted
    }

    /// Everything that is asked for and not served.
    pub fn refusals(&self) -> impl Iterator<Item = &Refusal> {
        self.refusals.values().flatten()
    }

    /// Addresses that are Services' as a whole.
    pub fn service_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.holders.keys().copied()
    }

    /// Returns other Services that won or lost a frontend.
    fn claim(&mut self, desired: &DesiredState, name: &Name) -> BTreeSet<Name> {
        let service = desired.services.get(name);
        let asked = service.map(|service| Asked::of(&self.context(), name, service));
        let depends = asked.as_ref().is_some_and(|asked| asked.depends_on_nodes);
        let frontends = asked.map(|asked| asked.frontends()).unwrap_or_default();
        if depends {
            self.depend_on_nodes.insert(name.clone());
        } else {
            self.depend_on_nodes.remove(name);
        }
        let claimant = Claimant {
            created_at_us: service.map_or(0, |service| service.created_at_us),
            uid: service
                .map(|service| service.uid.clone())
                .unwrap_or_default(),
            name: name.clone(),
        };
        self.claims.set(claimant, frontends)
    }

    fn context(&self) -> Context<'_> {
        Context {
            node: &self.node,
            options: &self.options,
            addresses: &self.addresses,
            cluster: &self.cluster,
            zone: &self.zone,
        }
    }

    fn compile_service(&mut self, desired: &DesiredState, name: &Name, wanted: &mut Wanted) {
        let compiled = desired
            .services
            .get(name)
            .map(|service| {
                let slices: Vec<_> = desired.slices_of(name).collect();
                let context = self.context();
                Asked::of(&context, name, service)
                    .compile(&context, &slices, |frontend| self.claims.holder(frontend))
            })
            .unwrap_or_default();
        let Compiled {
            services,
            addresses,
            refusals,
        } = compiled;
        for key in self.keys.remove(name).unwrap_or_default() {
            wanted.services.entry(key).or_insert(None);
        }
        if !services.is_empty() {
            self.keys
                .insert(name.clone(), services.keys().cloned().collect());
        }
        for (key, service) in services {
            wanted.services.insert(key, Some(service));
        }
        self.hold(name, addresses, wanted);
        self.refuse(Owner::Service(name.clone()), refusals);
    }

    fn hold(&mut self, name: &Name, addresses: BTreeSet<IpAddr>, wanted: &mut Wanted) {
        let before = self.held.remove(name).unwrap_or_default();
        for address in &addresses {
            *self.holders.entry(*address).or_default() += 1;
            wanted.addresses.insert(*address, true);
        }
        for address in before {
            if let Some(count) = self.holders.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    self.holders.remove(&address);
                    wanted.addresses.insert(address, false);
                }
            }
        }
        if !addresses.is_empty() {
            self.held
                .insert(name.clone(), addresses.into_iter().collect());
        }
    }

    fn refuse(&mut self, owner: Owner, refusals: Vec<Refusal>) {
        if refusals.is_empty() {
            self.refusals.remove(&owner);
        } else {
            self.refusals.insert(owner, refusals);
        }
    }

    fn compile_host_ports(&mut self, wanted: &mut Wanted) {
        let (services, refusals) =
            host_ports::compile(&self.host_ports, &self.addresses, |frontend| {
                self.claims.holder(frontend)
            });
        for key in std::mem::take(&mut self.host_keys) {
            wanted.services.insert(key, None);
        }
        self.host_keys = services.keys().cloned().collect();
        for (key, service) in services {
            wanted.services.insert(key, Some(service));
        }
        self.refusals
            .retain(|owner, _| matches!(owner, Owner::Service(_)));
        for refusal in refusals {
            self.refusals
                .entry(refusal.owner.clone())
                .or_default()
                .push(refusal);
        }
    }
}
