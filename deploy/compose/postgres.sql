-- Runs once, on an empty volume: creates Flywheel's own role, which owns its database and nothing else. The superuser
-- then has no password, so only a process inside this container can log in as it.
\getenv password POSTGRES_PASSWORD
CREATE ROLE flywheel LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'password';
CREATE DATABASE flywheel OWNER flywheel;
REVOKE ALL ON DATABASE flywheel, postgres, template1 FROM PUBLIC;
ALTER ROLE postgres PASSWORD NULL;
