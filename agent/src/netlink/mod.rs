//! Links, routes and neighbours by rtnetlink.
